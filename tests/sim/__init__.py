"""A package, so that test_layer.py here and test_layer.py of the story are different modules."""
