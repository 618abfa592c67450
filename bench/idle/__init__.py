"""What an application costs that has little to do."""
