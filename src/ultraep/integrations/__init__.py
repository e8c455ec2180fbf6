"""Balanced models of other libraries. Each subpackage imports only its own library."""
