"""Models and data sets that the command line and the studies train, and how to train them."""
