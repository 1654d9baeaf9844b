"""A model split over the processes of `mlx.launch`: rank 0 decides, the others run the same on their shard."""
