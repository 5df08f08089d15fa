"""What is specific to one kind of device: one file each."""
