"""Programs around the library: commands, simulator, viewer, demo, baselines."""
