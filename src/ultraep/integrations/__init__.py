"""Models of other libraries, balanced; each subpackage imports its library, and no other does."""
