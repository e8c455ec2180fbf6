"""Start ranks as processes of this machine, for the demo and for load tests."""
