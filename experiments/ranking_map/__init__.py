"""The map from agreement to probability that ranks candidates: fitted on some networks, tried on others."""
