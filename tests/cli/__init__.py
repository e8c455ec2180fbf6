"""A package, so that test_plan.py here and test_plan.py of the story are different modules."""
