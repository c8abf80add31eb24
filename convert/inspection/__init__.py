"""Show a checkpoint's sizes, its heads, and what merging them would cost."""
