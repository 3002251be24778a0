"""The measurements of the page Results: a catalogue, and the program that makes them (`make results`)."""
