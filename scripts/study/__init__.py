"""The study of merges: plans, their arms, the texts for evaluation, and the tables and figures of docs/study.md."""
