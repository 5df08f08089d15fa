"""What people look at: tables in the terminal, pages, figures, texts in both languages."""
