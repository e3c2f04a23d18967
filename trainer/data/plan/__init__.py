"""Which episodes each optimizer step consumes, decided before anything is read."""
