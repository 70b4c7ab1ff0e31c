"""Tools that measure, train and certify. The engine never imports them."""
