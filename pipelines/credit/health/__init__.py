"""What to know before training on advantages: integrity of groups, purity of anchors, figures of a job."""
