//! Requests for topics of the overlay, once they are admitted.

use super::{Failure, Passing, Proxy, before, refusal};
use crate::bridge::PREFIX;
use crate::config::RouteSettings;
use crate::routes::plain;
use http::{Method, Request, Response};
use ron_kernel::admission::deadline::REQUEST_TIMEOUT;
use ron_kernel::http::client::CallError;
use ron_kernel::http::{Body, ConnInfo};
use ron_kernel::problem::{CorrId, Rejection};
use ron_kernel::reason::Reason;
use std::time::Instant;

impl Proxy {
    /// Has a topic answered; the request's permits are held for as long as its answer lasts.
    pub(super) async fn bridge(
        &self,
        mut request: Request<Body>,
        conn: &ConnInfo,
        corr: &CorrId,
        route: &RouteSettings,
        passing: Passing,
    ) -> Result<Response<Body>, Rejection> {
        let late = |detail: &'static str| {
            self.rpc_timeouts.inc();
            Rejection::new(Reason::Deadline, detail)
        };
        let nobody = || Rejection::new(Reason::NoUpstream, "no overlay answers here").retry_after(1);
        let topics = self.topics.as_ref().ok_or_else(nobody)?;
        let budget = passing.budget;
        let mut asked = Request::new(Body::default());
        *asked.method_mut() = request.method().clone();
        let path = plain(request.uri().path()).unwrap_or_default();
        let topic = path.strip_prefix(PREFIX).unwrap_or_default().to_owned();
        // Who states no deadline does not wait for room.
        if let Some(own) = budget.client {
            let left = own.min(budget.until).saturating_duration_since(Instant::now()).as_millis();
            asked.headers_mut().extend(format!("{left}ms").parse().ok().map(|left| (REQUEST_TIMEOUT, left)));
        }
        let mut cost = passing.request_cost;
        if request.method() == Method::POST {
            // Its caps are those of the route, and have been put around it.
            let reading = request.body_mut().collect(usize::MAX);
            let read = before(budget.until, conn, reading).await;
            let read = read.ok_or_else(|| late("the request's body did not arrive in time"))?;
            let read =
                read.map_err(|error| refusal(Failure::Call(CallError::RequestBody(error)), &route.upstream))?;
            *asked.body_mut() = Body::full(read);
        }
        let answered = before(budget.until, conn, topics(topic, asked, corr.clone())).await;
        let response = answered.ok_or_else(|| late("the overlay did not answer in time"))??;
        let (pass, account, factor) = (passing.pass, passing.account, route.cost);
        Ok(response.map(|body| {
            let whole = body.ready_len().is_some();
            let body = body.map_data(move |piece| {
                cost += piece.len() as u64;
                pass.settle(factor.saturating_mul(cost));
                Ok(account.book(piece))
            });
            body.ending_by(if whole { Some(budget.until) } else { budget.client })
        }))
    }
}
