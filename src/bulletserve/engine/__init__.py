"""Component 4, the engine: carries out plans on one device. It obeys and does not judge."""
