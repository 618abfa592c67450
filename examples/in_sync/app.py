"""One shop database, and what is derived from it: a cache, a search index, files for the warehouse, and a view.

Nobody writes to any of them but this application, which follows the database's own log of changes.

python examples/in_sync/watch.py        a shop with clients that write, this application, and a count of what differs, live
SHOP=postgresql://me@localhost/shop headwater run examples/in_sync/app.py
"""

import os

import headwater as hw

SHOP = os.environ.get("SHOP", "sqlite:///./shop.db")
CACHE = os.environ.get("CACHE", "redis://127.0.0.1:6379/0")  # empty: there is no Redis, and the cache is left out

app = hw.App("in_sync", log="./in_sync")

products = app.table("products", source=SHOP)

if CACHE:
    app.sink(products, to=f"{CACHE}?prefix=products:&as=json", name="cache")
app.sink(products, to="tantivy:///./search", name="search")
app.sink(products, to="delta:///./warehouse/products", partition_by="category", name="warehouse")


@app.view(products, key="category", log_columns=["_offset"])
def per_category(products):
    """How many products each category has, and what they cost together, also when products change, move and go."""
    changes = products.versions
    return hw.totals(changes, by="category", key="product_id", at="_offset", products="count", value=("sum", "price"))


if __name__ == "__main__":
    app.run()
