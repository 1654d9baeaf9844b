"""What the routes of every API share: their context, reading bodies, background answers, common fields."""
