"""Online training: collect, credit, train, and again. The one place where trainer and pipelines meet."""
