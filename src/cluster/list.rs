//! Lists that may be long.

use kube::api::ListParams;
use kube::core::ObjectList;

use super::client::{CallError, call};

/// Objects in one answer.
const PAGE: u32 = 500;

/// All objects that `params` ask for, page by page, each with a deadline: `list` asks for one page.
///
/// # Errors
/// A page was refused or not answered.
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
