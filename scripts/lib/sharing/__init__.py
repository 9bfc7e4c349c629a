"""How processes of this machine share its GPUs: where they meet, what they say, and that those who only wait leave."""

DECIDES_NO_BYTE = True  # of any result: who had the GPU before makes nothing stale
