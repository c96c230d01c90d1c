//! Spans and sizes as a reader sees them.

use alloc::format;
use alloc::string::String;
use core::time::Duration;

/// Shows at most two units, such as `3m21s`.
pub fn format_duration(span: Duration) -> String {
    let secs = span.as_secs();
    match (secs / 3600, secs / 60 % 60, secs % 60) {
        (0, 0, secs) => format!("{secs}s"),
        (0, minutes, secs) => format!("{minutes}m{secs:02}s"),
        (hours, minutes, _) => format!("{hours}h{minutes:02}m"),
    }
}

/// Shows what [`format_duration`] shows; a negative span is none.
pub fn format_seconds(seconds: f64) -> String {
    format_duration(Duration::from_secs_f64(seconds.clamp(0.0, f64::from(u32::MAX))))
}

/// Shows binary units, rounded down to a tenth.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    for (unit, size) in UNITS {
        if bytes >= size {
            let tenths = u128::from(bytes) * 10 / u128::from(size);
            return format!("{}.{} {unit}", tenths / 10, tenths % 10);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_sizes_are_short() {
        let shown = |secs| format_duration(Duration::from_secs(secs));
        assert_eq!([shown(4), shown(201), shown(11_520)], ["4s", "3m21s", "3h12m"]);
        assert_eq!([format_seconds(-1.0), format_seconds(61.9)], ["0s", "1m01s"]);
        assert_eq!(
            [format_bytes(17), format_bytes(3 << 30), format_bytes((1 << 20) + (1 << 19))],
            ["17 B", "3.0 GiB", "1.5 MiB"]
        );
        assert_eq!(
            [format_bytes(100 << 10), format_bytes(252 << 10), format_bytes(u64::MAX)],
            ["100.0 KiB", "252.0 KiB", "16777215.9 TiB"]
        );
    }
}
