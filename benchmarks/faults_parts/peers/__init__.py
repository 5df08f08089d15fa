"""The peers' training scripts, each started in processes of its own."""
