"""Before the first step: settings tried on the model itself, and what was found remembered."""
