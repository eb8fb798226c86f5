"""Networks: plain torch modules that know nothing of algorithms, environments or configuration."""
