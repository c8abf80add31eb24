"""The models that a run trains: students and teachers, what of them is trained, and what they share."""
