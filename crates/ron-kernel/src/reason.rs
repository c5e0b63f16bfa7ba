//! Why a request was refused: one list for status, header, metric label, log line and document.

use crate::kernel::Service;
use crate::metrics::Counter;
use http::StatusCode;

macro_rules! reasons {
    ($( $variant:ident = $code:literal, $status:literal, $retryable:literal, $title:literal; )+) => {
        /// A short, stable code; the same in `X-Reason`, the problem body, the metric and the log.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Reason { $( #[doc = $title] $variant, )+ }

        impl Reason {
            pub const ALL: &'static [Reason] = &[$( Reason::$variant, )+];

            pub const fn code(self) -> &'static str {
                match self { $( Reason::$variant => $code, )+ }
            }

            /// The status it is answered with.
            pub const fn status(self) -> u16 {
                match self { $( Reason::$variant => $status, )+ }
            }

            /// Whether sending the same request again later can succeed.
            pub const fn retryable(self) -> bool {
                match self { $( Reason::$variant => $retryable, )+ }
            }

            pub const fn title(self) -> &'static str {
                match self { $( Reason::$variant => $title, )+ }
            }
        }
    };
}

reasons! {
    Malformed = "malformed", 400, false, "The request is malformed";
    Unauth = "unauth", 401, false, "Credentials are required";
    TokenInvalid = "token_invalid", 401, false, "The token is not valid";
    TokenExpired = "token_expired", 401, false, "The token has expired";
    TokenAudience = "token_audience", 401, false, "The token is meant for another audience";
    TokenRevoked = "token_revoked", 401, false, "The token is revoked";
    Forbidden = "forbidden", 403, false, "The credentials do not allow this";
    NotAllowed = "not_allowed", 403, false, "This is not served here";
    NoRoute = "no_route", 404, false, "No route leads here";
    NotFound = "not_found", 404, false, "There is nothing here";
    Method = "method", 405, false, "The method is not allowed here";
    NotAcceptable = "not_acceptable", 406, false, "Nothing that is stored is acceptable to the client";
    ReadTimeout = "read_timeout", 408, true, "The request did not arrive in time";
    ChainMismatch = "chain_mismatch", 409, false, "What the proposal touches has changed since";
    DuplicateApproval = "duplicate_approval", 409, false, "The signer has approved with another signature";
    Gone = "not_found", 410, false, "There is nothing here any more";
    Pruned = "pruned", 410, false, "This version is kept no more";
    LengthRequired = "length_required", 411, false, "The length of the body must be stated";
    Precondition = "precondition", 412, false, "A condition of the request is not met";
    BodyCap = "body_cap", 413, false, "The body is too large";
    DecodedCap = "decoded_cap", 413, false, "The decoded body is too large";
    DecodedRatio = "decoded_ratio", 413, false, "The body is compressed too well to be decoded safely";
    Uri = "uri", 414, false, "The request target is too long";
    UnsupportedEncoding = "unsupported_encoding", 415, false, "The content coding is not supported";
    InvalidRange = "invalid_range", 416, false, "The range cannot be satisfied";
    Expectation = "expectation", 417, false, "The expectation cannot be met";
    Host = "host", 421, false, "This host is not served here";
    Invalid = "invalid", 422, false, "The request was understood and refused";
    InvalidSig = "invalid_sig", 422, false, "The signature is not the signer's";
    RevokedKey = "revoked_key", 422, false, "The signer is not in the set in force";
    QuorumFailed = "quorum_failed", 422, false, "Too few approvals count";
    PolicyChanged = "policy_changed", 422, false, "The signer set has changed since the proposal was written";
    Expired = "expired", 422, false, "It is too late for this proposal";
    DigestSent = "digest_mismatch", 422, false, "The content is not what its digest says";
    RateLimit = "rate_limit", 429, true, "The rate limit is reached";
    QuotaGlobal = "quota_global", 429, true, "The rate limit of this service is reached";
    QuotaIp = "quota_ip", 429, true, "The rate limit of this address is reached";
    QuotaCapability = "quota_capability", 429, true, "The rate limit of these credentials is reached";
    QuotaTenant = "quota_tenant", 429, true, "The rate limit of this tenant is reached";
    Busy = "busy", 429, true, "The queue has no place for this request";
    Headers = "headers", 431, false, "The header section is too large";
    Internal = "internal", 500, false, "An internal error";
    MethodUnknown = "method_unknown", 501, false, "The method is not known";
    UpstreamError = "upstream_error", 502, true, "The upstream failed";
    Upstream = "upstream", 502, true, "The origin failed";
    DecompressCap = "decompress_cap", 502, false, "The origin's answer is compressed too well to be decoded safely";
    EtagInvalid = "etag_invalid", 502, true, "The origin's answer is not what its own tag or digest says";
    DigestStored = "digest_mismatch", 502, false, "The stored content is damaged";
    PackInvalid = "pack_invalid", 502, false, "The pack is not valid";
    Amnesia = "amnesia", 503, false, "The object is larger than the memory for objects";
    Conns = "conns", 503, true, "Too many connections";
    Degraded = "degraded", 503, true, "Writes are shed for now";
    Draining = "draining", 503, true, "The service is shutting down";
    NotReady = "not_ready", 503, true, "The service is not ready for this";
    Storage = "storage", 503, true, "The storage does not take or give this now";
    BreakerOpen = "breaker_open", 503, true, "The upstream keeps failing and is left alone for a while";
    NoUpstream = "no_upstream", 503, true, "No server of the upstream is healthy";
    Shed = "shed", 503, true, "The service is over its capacity";
    Deadline = "deadline", 504, true, "The deadline has passed";
    Timeout = "timeout", 504, true, "It was not done in time";
    CommitUnknown = "commit_unknown", 504, false, "Whether it was committed is not known yet";
    NoRoom = "storage", 507, true, "There is no room to store this";
}

impl Reason {
    pub fn status_code(self) -> StatusCode {
        StatusCode::from_u16(self.status()).expect("the table holds valid statuses")
    }
}

/// `rejected_total` of one service, a counter per reason, fetched once.
#[derive(Clone, Debug)]
pub struct Rejections {
    counters: Vec<Counter>,
}

impl Rejections {
    pub fn new(service: &Service) -> Rejections {
        let counter = |reason: &Reason| {
            service.counter("rejected_total", "Requests refused, by reason.", "reason", reason.code())
        };
        Rejections { counters: Reason::ALL.iter().map(counter).collect() }
    }

    /// How often each reason was counted so far. Two reasons of one code share a count.
    pub fn counts(&self) -> impl Iterator<Item = (Reason, u64)> {
        Reason::ALL.iter().zip(&self.counters).map(|(reason, counter)| (*reason, counter.value()))
    }

    pub fn count(&self, reason: Reason) {
        self.counters[reason as usize].inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients and dashboards depend on these: change a line only together with the changelog.
    #[test]
    fn reasons_and_their_statuses_are_pinned() {
        let table: Vec<String> = Reason::ALL.iter().map(|r| format!("{} {}", r.status(), r.code())).collect();
        let golden = include_str!("reason/golden.txt");
        assert_eq!(table.join("\n"), golden.trim_end());
    }

    #[test]
    fn capacity_and_share_are_never_mixed() {
        for reason in Reason::ALL {
            use Reason::{Busy, QuotaCapability, QuotaGlobal, QuotaIp, QuotaTenant, RateLimit};
            let quota = matches!(reason, QuotaGlobal | QuotaIp | QuotaCapability | QuotaTenant);
            let share = quota || matches!(reason, RateLimit | Busy);
            assert_eq!(reason.status() == 429, share, "{}", reason.code());
            assert_eq!(reason.status_code().as_u16(), reason.status());
        }
    }
}
