"""What people look at: pages, figures, terminal output, texts in both languages."""
