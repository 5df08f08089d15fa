"""What people see of a study: page, pictures, words, importance, commands."""
