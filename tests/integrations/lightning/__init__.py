"""Lightning: Fabric and its Trainer."""
