"""Models and data sets that the command line and the studies train, and how to train them.

    models.py      a model by name, perceptrons (lenet, cifarnet, resnet, transformer: one file per family)
    dataset.py     what a data set is           data.py: a data set by name, and where to get it
    images.py      idx files, CIFAR-10 and digits   python_text.py: source of the standard library
    download.py    fetch a data set, on request only, checksums verified
    batches.py     whose examples come next     augment.py: random crops, flips and contrast
    recipe.py      a rate with its schedule, batch, steps, and the optimizer that follows from them
    recipes.py     the recipe of each model and data set, with where the numbers come from
    training.py    all of these as one worker trains them: model, optimizer, batches
    evaluate.py    losses, and a model's score

Nothing here knows of codecs, servers or wires. Importing reads no file, and nothing downloads by itself.
"""
