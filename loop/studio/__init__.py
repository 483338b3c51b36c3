"""`rlake studio`: a web application over a store, which reads it and shows what happens in it."""
