"""Tables and figures, from record files alone; nothing here loads torch."""
