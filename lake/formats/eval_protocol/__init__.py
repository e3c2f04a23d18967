"""eval-protocol rows."""
