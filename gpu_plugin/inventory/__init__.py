"""What the kubelet is told: offers, health and what pods hold, put together as one immutable snapshot."""
