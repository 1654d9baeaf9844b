"""Where models come from: files, hub, adapters, fingerprints."""
