//! Dates from Unix time, as HTTP and as logs write them.

use std::time::Duration;

const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// A Unix time as `Sun, 06 Nov 1994 08:49:37 GMT`.
pub fn http_date(unix: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
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

/// The Unix time of an HTTP date in any of its three forms (RFC 9110, section 5.6.7). Dates before 1970 are none.
///
/// A year of two digits that would be more than 50 years after `now` is the past one with those digits.
pub fn parse_http_date(text: &str, now: u64) -> Option<u64> {
    let words: Vec<&str> = text.split([' ', ',', '-']).filter(|word| !word.is_empty()).collect();
    let [weekday, rest @ ..] = words.as_slice() else { return None };
    let is_word = |word: &str| word.bytes().all(|byte| byte.is_ascii_alphabetic());
    if !is_word(weekday) || text.len() > 40 {
        return None;
    }
    let (day, month, year, time) = match *rest {
        [day, month, year, time, "GMT"] => (day, month, year, time),
        // asctime: the year comes last, and there is no zone.
        [month, day, time, year] => (day, month, year, time),
        _ => return None,
    };
    let month = MONTHS.iter().position(|known| *known == month)? as u64 + 1;
    let year = match year.len() {
        4 => digits(year)?,
        2 => {
            let (current, _, _) = civil(now / 86_400);
            let guess = current - current % 100 + digits(year)?;
            if guess > current + 50 { guess - 100 } else { guess }
        }
        _ => return None,
    };
    let mut clock = time.split(':').map(|part| digits(part).filter(|_| part.len() == 2));
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    // A leap second is the last one of its minute.
    if clock.next().is_some() || hour > 23 || minute > 59 || second > 60 || year < 1970 {
        return None;
    }
    let days = days_of(year, month, digits(day)?)?;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second.min(59))
}

fn digits(text: &str) -> Option<u64> {
    let fits = (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    fits.then(|| text.parse().ok()).flatten()
}

/// Days since 1970 of a date; `None` if there is no such day.
fn days_of(year: u64, month: u64, day: u64) -> Option<u64> {
    let shifted = if month > 2 { year } else { year - 1 };
    let (era, year_of_era) = (shifted / 400, shifted % 400);
    let month_index = (month + 9) % 12;
    let day_of_year = (153 * month_index + 2) / 5 + day.checked_sub(1)?;
    let days = (era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year)
        .checked_sub(719_468)?;
    (civil(days) == (year, month, day)).then_some(days)
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
    fn the_three_forms_of_a_date_are_one_time() {
        const AT: u64 = 784_111_777;
        assert_eq!(http_date(AT), "Sun, 06 Nov 1994 08:49:37 GMT");
        for form in
            ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"]
        {
            assert_eq!(parse_http_date(form, AT), Some(AT), "{form}");
        }
        assert_eq!(parse_http_date("Sunday, 06-Nov-94 08:49:37 GMT", 2_600_000_000), Some(3_939_871_777));
        for wrong in [
            "",
            "0",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 31 Feb 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 24:00:00 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 8:49:37 GMT",
            "Sun, 06 Nov 1969 08:49:37 GMT",
            "Sun, 06 Nov 94 08:49:37 PST",
            "Sun, 06 nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(parse_http_date(wrong, AT), None, "{wrong}");
        }
    }

    #[test]
    fn every_date_that_is_written_is_read_again() {
        for step in 0..40_000 {
            let at = step * 123_457;
            assert_eq!(parse_http_date(&http_date(at), 0), Some(at));
        }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let log = |secs, millis| timestamp(Duration::from_secs(secs) + Duration::from_millis(millis));
        assert_eq!(log(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(log(784_111_777, 7), "1994-11-06T08:49:37.007Z");
        assert_eq!(log(1_709_164_800, 999), "2024-02-29T00:00:00.999Z");
        assert_eq!(log(1_735_689_599, 0), "2024-12-31T23:59:59.000Z");
    }
}
