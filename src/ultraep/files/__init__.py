"""Files that users name: bounded reading, atomic writing."""
