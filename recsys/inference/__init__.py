"""From a checkpoint to recommendations: exporter, package, predictor, top-k."""
