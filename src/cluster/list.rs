//! Paginated lists.

use kube::api::ListParams;
use kube::core::ObjectList;

use super::client::{CallError, call};

/// Objects per page.
const PAGE: u32 = 500;

/// All objects that match `params`; `list` requests one page, which has a deadline.
///
/// # Errors
/// A page could not be read.
pub async fn all<K>(
    params: ListParams,
    list: impl AsyncFn(ListParams) -> kube::Result<ObjectList<K>>,
) -> Result<Vec<K>, CallError>
where
    K: Clone,
{
    let mut params = params.limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = call(list(params.clone())).await?;
        found.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(found),
        }
    }
}
