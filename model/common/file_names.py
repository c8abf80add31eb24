"""Name the files that `convert` and `uptrain` write into a model's folder."""

CONVERSION_RECORD = "groupwise.json"
"""The file in which a conversion records its source, its options and the merged tensors."""
UPTRAINING_RECORD = "uptraining.json"
"""The file in which an export records how the model was trained."""
CALIBRATION_TOKENS = "groupwise_calibration.xz"
"""The file of the tokens that a converted model was calibrated on (`convert.calibration_text.read.pack`)."""
MODEL_CARD = "README.md"
