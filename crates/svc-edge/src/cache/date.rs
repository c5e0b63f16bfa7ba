//! HTTP dates (RFC 9110 section 5.6.7) and the local clock they are compared with.

const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const DAY_SECS: i64 = 86_400;
/// Half a century, beyond which a year of two digits is meant to have passed.
const TWO_DIGITS_AHEAD: i64 = 50;

/// A moment of the local clock, in milliseconds since 1970.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixMillis(pub u64);

impl UnixMillis {
    pub fn secs(self) -> i64 {
        i64::try_from(self.0 / 1000).unwrap_or(i64::MAX)
    }

    /// Zero where the clock was set back.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Reads a date of any of the three forms, in whatever case (RFC 9111 section 4.2), as Unix seconds.
///
/// `now` gives a year of two digits its century. The name of the day is read but not compared with the date.
pub fn parse(value: &[u8], now: UnixMillis) -> Option<i64> {
    let text = std::str::from_utf8(value).ok()?;
    let (first, rest) = text.split_once(' ')?;
    let Some(day_name) = first.strip_suffix(',') else {
        return asctime(first, rest);
    };
    let rest = strip_suffix_ignore_case(rest, " GMT")?;
    let (date, time) = rest.rsplit_once(' ')?;
    if is_day(day_name, true) {
        // Sun, 06 Nov 1994 08:49:37 GMT
        let mut parts = date.split(' ');
        let (day, month, year) = (parts.next()?, parts.next()?, parts.next()?);
        return moment(digits(year, 4)?, month, digits(day, 2)?, time).filter(|_| parts.next().is_none());
    }
    // Sunday, 06-Nov-94 08:49:37 GMT
    let mut parts = date.split('-');
    let (day, month, year) = (parts.next()?, parts.next()?, digits(parts.next()?, 2)?);
    if !is_day(day_name, false) || parts.next().is_some() {
        return None;
    }
    let (this_year, ..) = civil(now.secs().min(253_402_300_799).div_euclid(DAY_SECS));
    let mut year = this_year - this_year % 100 + year;
    if year > this_year + TWO_DIGITS_AHEAD {
        year -= 100;
    } else if year <= this_year + TWO_DIGITS_AHEAD - 100 {
        year += 100;
    }
    moment(year, month, digits(day, 2)?, time)
}

/// Sun Nov  6 08:49:37 1994
fn asctime(day_name: &str, rest: &str) -> Option<i64> {
    let (month, rest) = rest.split_once(' ')?;
    let day = rest.get(..2)?;
    let (time, year) = rest.get(2..)?.strip_prefix(' ')?.split_once(' ')?;
    let day = match day.strip_prefix(' ') {
        Some(digit) => digits(digit, 1)?,
        None => digits(day, 2)?,
    };
    moment(digits(year, 4)?, month, day, time).filter(|_| is_day(day_name, true))
}

/// A moment as `Sun, 06 Nov 1994 08:49:37 GMT`; years past 9999 and before 1970 are not written.
pub fn format(secs: i64) -> String {
    let secs = secs.clamp(0, 253_402_300_799);
    let (days, second) = (secs / DAY_SECS, secs % DAY_SECS);
    let (year, month, day) = civil(days);
    let name = |names: &[&'static str], index: i64| {
        usize::try_from(index).ok().and_then(|index| names.get(index)).map_or("", |name| &name[..3])
    };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (day_name, month_name) = (name(&DAYS, days % 7), name(&MONTHS, month - 1));
    format!("{day_name}, {day:02} {month_name} {year:04} {hour:02}:{minute:02}:{second:02} GMT")
}

fn moment(year: i64, month: &str, day: i64, time: &str) -> Option<i64> {
    let month = 1 + MONTHS.iter().position(|name| name.eq_ignore_ascii_case(month))? as i64;
    let mut parts = time.split(':');
    let mut part = |max| digits(parts.next()?, 2).filter(|value| *value <= max);
    // A leap second is the next one, as POSIX counts.
    let (hour, minute, second) = (part(23)?, part(59)?, part(60)?);
    let days = days_of(year, month, day);
    let exists = day >= 1 && civil(days) == (year, month, day);
    (exists && parts.next().is_none()).then_some(days * DAY_SECS + hour * 3600 + minute * 60 + second)
}

fn digits(text: &str, count: usize) -> Option<i64> {
    let good = text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| good)
}

fn is_day(name: &str, short: bool) -> bool {
    DAYS.iter().any(|day| if short { &day[..3] } else { day }.eq_ignore_ascii_case(name))
}

fn strip_suffix_ignore_case<'a>(text: &'a str, suffix: &str) -> Option<&'a str> {
    let at = text.len().checked_sub(suffix.len())?;
    let (rest, end) = text.split_at_checked(at)?;
    end.eq_ignore_ascii_case(suffix).then_some(rest)
}

/// Year, month and day of a day since 1970, with years that begin in March so that a leap day comes last.
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    (era * 400 + year_of_era + i64::from(month < 3), month, day)
}

/// The inverse of [`civil`].
fn days_of(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month < 3);
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 6 November 1994, 08:49:37.
    const EXAMPLE: i64 = 784_111_777;
    const NOW: UnixMillis = UnixMillis(1_700_000_000_000);

    #[test]
    fn the_three_forms_are_read_in_any_case() {
        for text in [
            "Sun, 06 Nov 1994 08:49:37 GMT",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun Nov  6 08:49:37 1994",
            "SUN, 06 NOV 1994 08:49:37 gMT",
            "sunday, 06-nov-94 08:49:37 gmt",
            // The day's name is redundant and often wrong.
            "Mon, 06 Nov 1994 08:49:37 GMT",
        ] {
            assert_eq!(parse(text.as_bytes(), NOW), Some(EXAMPLE), "{text}");
        }
        assert_eq!(parse(b"Sun Nov 16 08:49:37 1994", NOW), Some(EXAMPLE + 10 * DAY_SECS));
        assert_eq!(parse(b"Thu, 01 Jan 1970 00:00:00 GMT", NOW), Some(0));
        assert_eq!(parse(b"Wed, 31 Dec 1969 23:59:59 GMT", NOW), Some(-1));
        assert_eq!(parse(b"Thu, 29 Feb 2024 23:59:60 GMT", NOW), Some(1_709_251_200));
    }

    // RFC 9110 section 5.6.7: more than fifty years ahead is the most recent past year of those digits.
    #[test]
    fn two_digits_are_a_year_near_now() {
        let year = |digits: &str| {
            let text = format!("Thursday, 18-Aug-{digits} 02:01:18 GMT");
            civil(parse(text.as_bytes(), NOW).unwrap().div_euclid(DAY_SECS)).0
        };
        assert_eq!(
            (year("23"), year("50"), year("73"), year("74"), year("99")),
            (2023, 2050, 2073, 1974, 1999)
        );
        let late = UnixMillis(3_786_912_000_000);
        let text = b"Thursday, 18-Aug-10 02:01:18 GMT";
        assert_eq!(civil(parse(text, late).unwrap().div_euclid(DAY_SECS)).0, 2110, "the clock says 2090");
    }

    #[test]
    fn anything_else_is_no_date() {
        for text in [
            "",
            "0",
            "-1",
            "Sun, 06 Nov 1994 08:49:37 UTC",
            "Sun, 06 Nov 1994 08:49:37 +0000",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Nov 94 08:49:37 GMT",
            "Sun 06 Nov 1994 08:49:37 GMT",
            "Sun, 06  Nov  1994 08:49:37 GMT",
            "Sun, 06-Nov-1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08.49.37 GMT",
            "Sun, 06 Nov 1994 8:49:37 GMT",
            "Sun, 6 Nov 1994 08:49:37 GMT",
            "Sun, 31 Feb 1994 08:49:37 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 06 Nov 1994 08:60:37 GMT",
            "Sun, 06 Nov 1994 08:49:61 GMT",
            "Sun, 06 Nov 1994 08:49:37:00 GMT",
            "Son, 06 Nov 1994 08:49:37 GMT",
            "Sunday, 06 Nov 1994 08:49:37 GMT",
            "Sun, 06-Nov-94 08:49:37 GMT",
            "Sun Nov 6 08:49:37 1994",
            "Sun Nov  6 08:49:37 1994 GMT",
            " Sun, 06 Nov 1994 08:49:37 GMT",
            "Sun, +6 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 08:49:37 GM\u{fc}",
        ] {
            assert_eq!(parse(text.as_bytes(), NOW), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_as_the_same_moment(secs in 0i64..=253_402_300_799) {
            prop_assert_eq!(parse(format(secs).as_bytes(), NOW), Some(secs));
        }

        #[test]
        fn the_calendar_is_its_own_inverse(days in -800_000i64..3_000_000) {
            let (year, month, day) = civil(days);
            prop_assert_eq!(days_of(year, month, day), days);
        }
    }
}
