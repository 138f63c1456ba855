"""Where text comes from: one class per option of data=... (conf/data), found by their registered names."""
