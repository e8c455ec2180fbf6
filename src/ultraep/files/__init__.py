"""Files that users name: what is read is bounded, what is written is whole or not there."""
