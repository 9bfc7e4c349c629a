"""Files, manifests, provenance, settings, progress: what every room stands on. Knows nothing above."""
