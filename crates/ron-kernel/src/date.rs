//! Dates from Unix time, as HTTP and as logs write them.

use std::time::Duration;

/// A Unix time as `Sun, 06 Nov 1994 08:49:37 GMT`.
pub(crate) fn http_date(unix: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (days, second) = (unix / 86_400, unix % 86_400);
    let (year, month, day) = civil(days);
    let index = |n: u64| usize::try_from(n).unwrap_or(0);
    format!(
        "{}, {day:02} {} {year:04} {:02}:{:02}:{:02} GMT",
        DAYS[index(days % 7)],
        MONTHS[index(month - 1)],
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// A time since 1970 as `1994-11-06T08:49:37.123Z` (RFC 3339).
pub fn timestamp(unix: Duration) -> String {
    let (days, second) = (unix.as_secs() / 86_400, unix.as_secs() % 86_400);
    let (year, month, day) = civil(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        second / 3600,
        second / 60 % 60,
        second % 60,
        unix.subsec_millis()
    )
}

/// Year, month and day of a day since 1970, with years that begin in March so that a leap day comes last.
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = era * 400 + year_of_era + u64::from(month < 3);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let log = |secs, millis| timestamp(Duration::from_secs(secs) + Duration::from_millis(millis));
        assert_eq!(log(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(log(784_111_777, 7), "1994-11-06T08:49:37.007Z");
        assert_eq!(log(1_709_164_800, 999), "2024-02-29T00:00:00.999Z");
        assert_eq!(log(1_735_689_599, 0), "2024-12-31T23:59:59.000Z");
    }
}
