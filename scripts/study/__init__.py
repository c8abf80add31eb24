"""The study of merges: plans, their arms, the texts they are judged on, and the tables and figures of docs/study.md."""
