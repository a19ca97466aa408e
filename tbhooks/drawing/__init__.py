"""Numbers as text, heat maps and pixels. No torch."""
