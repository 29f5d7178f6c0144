"""Tests on whole models: rules per torch function are enough, whatever the module classes are."""
