"""Commands, simulator, reports, viewer, demo and load tests: the library imports none of them."""
