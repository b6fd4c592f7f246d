"""Attention of prompt chunks over cached pages on sm_90: plan, kernel, launch, combination of splits."""
