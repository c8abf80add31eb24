"""Helpers that both the file layer and the model use: errors, console, files, staging folders, text, checks."""
