"""The parts of the shipper: one `Worker` per tracker, its durable `Cursor`, and the `settle` of runs that died."""
